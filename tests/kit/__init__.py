"""What several rooms of the tests share: data, harnesses, stand-ins."""
