"""How many drafted tokens the target accepts: counted by replay or by a live server, compared with intervals."""
