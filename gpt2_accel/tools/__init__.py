"""What is beside training: studies, reports, pages, importers."""
