"""Figures of the operations between ranks, beside gloo and MPI."""
