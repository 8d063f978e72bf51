"""What a machine can do and what a model costs on it: sizes, plans of memory and time, a look at the machine."""
