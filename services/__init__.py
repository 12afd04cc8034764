"""The three services, the embedded engine and the command line. Import packages, not an API."""
