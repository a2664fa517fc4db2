"""Environments of other libraries, under names that a recipe can use without code of its own.

    packages    the packages, each with the version that its adapter is written for
    reasoning   data sets of reasoning_gym as prompts, their scorers as a verifier
    episodes    what the environments of several turns have in common
    gym         environments of gymnasium with texts
    arena       games of textarena for one player
    openenv     environments behind an OpenEnv server
    verifiers_agent  environments of verifiers, played by a program in another Python, verifiers_env

No adapter's package is installed with megarl.
"""
