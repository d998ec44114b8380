"""How the processes of a job begin: launchers, the meeting of the ranks, torchrun's variables."""
