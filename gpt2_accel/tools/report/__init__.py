"""The report of runs: reading their folders, figures, the HTML page."""
