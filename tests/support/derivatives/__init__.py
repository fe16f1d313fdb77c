"""Problems, references and differences for derivatives of higher order."""
