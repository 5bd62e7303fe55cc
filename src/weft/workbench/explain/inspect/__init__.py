"""Static inspection of kernels without a GPU: source, PTX, SASS and the numbers that follow from them."""
