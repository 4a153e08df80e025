"""Programs at run time: dispatch of a call, gradients, the operators that torch sees."""
