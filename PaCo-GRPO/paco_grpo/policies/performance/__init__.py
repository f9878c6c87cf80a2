"""The same transformer faster or in less memory: compiled blocks, attention backends, quantization, offloading, caches."""


class AccelerationError(RuntimeError):
    """An acceleration does not work on this machine; the message says what is missing."""
