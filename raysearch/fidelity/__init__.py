"""How true the simulator is: measuring, fitting and validating."""
