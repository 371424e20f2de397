"""What a plan does in time: an event simulation of every process under its schedule."""
