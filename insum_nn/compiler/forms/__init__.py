"""Forms of generated kernels and their text: the present middle end of the Triton backend."""
