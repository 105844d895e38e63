"""The paper's experiments, each with the paper's own figures beside what is measured here.

`figures` holds what the paper reports, `experiments` what is run for it, `measure` runs it, `tables` prints it.
"""
