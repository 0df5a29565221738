"""The engine: workers, the driver around the core, and the transports between them."""
