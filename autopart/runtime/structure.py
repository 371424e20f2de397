"""Nested inputs and outputs as plain data: a tree whose leaves are tensor numbers or constants.

A structure is one of (all JSON):

    {"tensor": 3}                                          the tensor with that number
    {"constant": value}                                    None, bool, int, float or str (non-finite floats as "inf", ...)
    {"list": [...]}, {"tuple": [...]}                      children in order
    {"dict": [[key, child], ...]}                          insertion order kept; keys are constants
    {"object": "package.module:Class", "fields": [[name, child], ...], "base": "dict" | "tuple" | "object"}

An object is a dataclass, a named tuple or a `ModelOutput`: rebuilt as its own class where that can be imported, else as
`Record`, a dict whose keys are attributes too.
"""
