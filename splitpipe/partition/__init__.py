"""How a module becomes stages: its blocks, where its parameters live, and how calls of its blocks are intercepted."""
