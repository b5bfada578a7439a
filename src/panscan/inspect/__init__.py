"""See what a model, a machine or a recording does: profiles, traces, checks of this machine, attention."""
