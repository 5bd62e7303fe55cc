"""Right where only the last result is needed."""


def separate(chain, sizes):
    """Return the elements that are read and written with a kernel for each step."""
    return sum(sizes[name] for output, inputs in chain for name in [*inputs, output])


def fused(chain, sizes, needed):
    """Return the elements that are read and written with one kernel for all steps."""
    outputs = {output for output, _ in chain}
    read = {name for _, inputs in chain for name in inputs} - outputs
    return sum(sizes[name] for name in read) + sizes[chain[-1][0]]
