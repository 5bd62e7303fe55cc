"""Taking kernels apart, with no GPU: source, PTX and SASS, and what they say in numbers."""
