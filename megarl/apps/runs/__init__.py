"""Commands about a run folder, or about the model in it: report, status, timeline, ledger, replay,
rollout, chat.
"""
