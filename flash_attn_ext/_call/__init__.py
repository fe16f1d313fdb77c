"""A public function's arguments on their way to the extension: what users pass, as one problem in one form."""
