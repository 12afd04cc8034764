"""The message broker as the engine sees it: one port, RabbitMQ and an in-memory broker behind it.

Messages carry nothing but hints (ids): losing, doubling or reordering them is harmless, because the lock decides who
runs a job. One conformance suite runs over both implementations.
"""
