"""What an implementation does with its time, seen by three instruments.

``work`` binds a subject to its inputs, ``instruments`` measure the same calls in turn by a
``schedule``, ``agreement`` says whether they tell the same, ``stacks`` and ``flame`` fold and draw
the trace, ``rows`` lists what ran, ``artefacts`` are the files, and ``session`` is all of it.
"""
