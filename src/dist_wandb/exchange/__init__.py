"""How the numbers of all ranks become one."""
