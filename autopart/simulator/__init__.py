"""What a plan does in time: an event simulation of every process under the program that its schedule runs."""

from autopart.simulator.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
