//! The built-in models.
