"""The process itself: a failure that ends the whole job, forked children, standard streams."""
