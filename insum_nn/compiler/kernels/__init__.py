"""Programs of generated kernels: their machine code, the rows that they walk, their launches."""
