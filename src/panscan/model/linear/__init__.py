"""Matrix multiplication with dense, 8-bit and 4-bit weights: storage, published formats, arithmetic and kernels."""
