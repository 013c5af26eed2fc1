from harbor_trl import HarborEnv
class TerminalNotesEnv(HarborEnv):
    pass
