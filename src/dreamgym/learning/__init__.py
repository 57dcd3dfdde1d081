"""The whole loop in one call: collect, fine-tune, practise in the dream, evaluate in reality."""
