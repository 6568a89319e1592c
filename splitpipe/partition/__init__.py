"""How a module becomes stages: its blocks, the homes of its parameters, and how calls of its blocks are taken."""
