"""The embedded engine: the three services in one process on SQLite and an in-memory broker, over real gRPC."""
