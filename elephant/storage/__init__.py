"""Storage: file systems and folders of whole files."""
