"""Other libraries that know cupyops: one module each, which imports the library when it is first asked to."""
