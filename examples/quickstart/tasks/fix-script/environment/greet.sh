name=world
ehco "hello $name"
