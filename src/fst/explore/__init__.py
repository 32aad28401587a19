"""A local page to play with a trained model: `fst explore`.

`problems` says what is observed and what the solution is, `explorer` asks the model, and `server`
puts both behind a page for the browser of the same machine.
"""
