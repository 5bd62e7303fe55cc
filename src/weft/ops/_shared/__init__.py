"""What two or more operators use: validation, registration with PyTorch, device code."""
