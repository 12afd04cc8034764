"""Job type `synthetic`: does what its input says and nothing else; for tests and benchmarks of the engine."""
