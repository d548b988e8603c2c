//! From a prompt to a picture: what happens around the graphs. Sees no graph and no session.
