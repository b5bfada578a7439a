"""Whether a computation is the reference's: the reference, observations of it, comparisons with it, and the verdict."""
