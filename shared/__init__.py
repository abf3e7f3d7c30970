"""What the chapters share: small modules, each with one job. Model code lives in the chapters, never here."""
