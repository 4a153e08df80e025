"""Plans of library calls, as FX graphs: the present middle end of the library and Inductor backends."""
