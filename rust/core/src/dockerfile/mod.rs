//! What a Dockerfile puts where: parser, shell lexer, copy plan (BuildKit's rules).
