"""The verbs about whole fleets: which models are served where, and how much of it is needed."""
