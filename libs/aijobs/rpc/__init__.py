"""How the services speak gRPC: addresses, roles, errors on the wire, the server and the channel."""
