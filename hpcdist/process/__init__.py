"""How this process begins and ends: one rank's failure ends the job, forked children, standard streams."""
