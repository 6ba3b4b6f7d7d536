"""Small bugs that the tests must find: `make mutants` puts one at a time into a copy of the tree and runs its tests.

A mutant is an entry of one of the TOML files here, one file for each room of the code:

    [[mutant]]
    id = "a-few-words-with-hyphens"
    why = "What goes wrong for whom, in one sentence."
    function = "kvstore.service.sessions:Sessions.join"   # module, then the function, method or class
    old = "self._sessions.get((tenant.tenant, token))"    # an expression, or statements; exactly once in there
    new = "next(iter(self._sessions.values()), None)"     # what stands there instead
    tests = ["tests/service/test_sessions.py::test_..."]  # the narrowest that find it: at least one has to fail
    environment = "engines"                               # only where the tests need the engines' environment

`old` is compared as syntax, so neither line numbers nor spaces, quotes and line breaks matter. Where a change of the
code renames what an entry names, `tests/test_mutants.py` says so at once, and the entry is corrected with it. An entry
goes only with the invariant that it breaks. Every test file here is also run without the mutant, and must pass.
"""
