"""How a process defines its settings, and reads them from flags, variables and a file."""
