"""What is beside training: studies, reports, pages, GGUF export, importers."""
