"""The same transformer faster or in less memory: compiled blocks, attention backends, quantization, offloading, caches."""
