//! Python bindings of `harbor_trl_core::suite` and `::task`.
