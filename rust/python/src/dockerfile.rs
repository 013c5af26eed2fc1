//! Python bindings of `harbor_trl_core::dockerfile`.
